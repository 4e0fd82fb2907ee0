"""Programs that train and measure with gossipjax, and what they share."""
