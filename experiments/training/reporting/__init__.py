"""What a run writes while it trains: files, progress bars, clocks."""
