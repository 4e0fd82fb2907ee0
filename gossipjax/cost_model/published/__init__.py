"""Published seconds, hours and bandwidths beside those of the model: modelled, not measured.

    python -m gossipjax.cost_model.published

prints all tables. One network, `networks.SGP_ETHERNET`, is fitted, on the 16 figures of SGP-18
Table 2; the others follow. README.md says what is assumed of each. NumPy only.
"""

from gossipjax.cost_model.published._resnet import fit_sgp_ethernet, fit_slowmo_compute
from gossipjax.cost_model.published._utilization import BANDWIDTH_GRID
from gossipjax.cost_model.published.tables import (
    COMPARISONS,
    Row,
    compare_sgp18_table2,
    compare_sgp19_table1,
    compare_sgp19_table2,
    compare_sgp19_table3,
    compare_sgp19_table4,
    compare_sgp19_table5,
    compare_slowmo_table2,
    compare_streaming_diloco_table4,
    compare_what_if,
    count_cells,
)

__all__ = [
    "BANDWIDTH_GRID",
    "COMPARISONS",
    "Row",
    "compare_sgp18_table2",
    "compare_sgp19_table1",
    "compare_sgp19_table2",
    "compare_sgp19_table3",
    "compare_sgp19_table4",
    "compare_sgp19_table5",
    "compare_slowmo_table2",
    "compare_streaming_diloco_table4",
    "compare_what_if",
    "count_cells",
    "fit_sgp_ethernet",
    "fit_slowmo_compute",
]
