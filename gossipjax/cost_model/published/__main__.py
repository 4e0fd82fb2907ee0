"""Prints published figures beside the model's."""

from gossipjax.cost_model.published import COMPARISONS, count_cells


def main() -> None:
    """Prints all tables."""
    for compare in COMPARISONS:
        rows = compare()
        print(f"{rows[0].table} ({rows[0].unit}), modelled")
        for row in rows:
            off = f"{count_cells(row):+d} cells" if row.unit == "Gbit/s" else f"{row.error:+.1%}"
            fitted = ", fitted" if row.is_fitted else ""
            print(
                f"  {row.name:<42}{row.nodes:>4} nodes  modelled {row.predicted:8.3f}"
                f"  published {row.published:8.3f}  {off}{fitted}"
            )
        print()


if __name__ == "__main__":
    main()
