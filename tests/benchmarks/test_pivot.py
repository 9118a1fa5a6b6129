"""Markdown tables of benchmarks/lib/pivot.py."""

ROWS = [
    {"case": "b", "m": 2, "impl": "ours", "x": 1.25},
    {"case": "b", "m": 2, "impl": "peer", "x": 1.0},
    {"case": "a", "m": 16, "impl": "third", "x": 3.0},
    {"case": "a", "m": 16, "impl": "ours", "x": 0.5},
    {"case": "a", "m": 16, "impl": "ours", "x": 0.75},
]


def test_a_table_has_a_line_and_a_column_for_each_value(module):
    pivot = module("lib.pivot")
    assert pivot.pivot(ROWS, ["case", "m"], ("case", "m"), "impl", pivot.last(lambda row: f"{row['x']:.2f}")) == [
        "| case | m | ours | peer | third |",
        "|---|---|---|---|---|",
        "| b | 2 | 1.25 | 1.00 |  |",
        "| a | 16 | 0.75 |  | 3.00 |",
    ]


def test_order_titles_and_cells_are_given(module):
    pivot = module("lib.pivot")

    def share(rows, line):
        return f"{len(rows)} of {sum(map(len, line.values()))}"

    table = pivot.pivot(
        ROWS,
        ["m"],
        lambda row: (row["m"],),
        ("impl",),
        share,
        show=lambda m: [f"m={m}"],
        title=lambda column: column[0].upper(),
        lines=lambda values: sorted(values, reverse=True),
        columns=lambda _: [("peer",), ("ours",), ("none",)],
    )
    assert table == [
        "| m | PEER | OURS | NONE |",
        "|---|---|---|---|",
        "| m=16 |  | 2 of 3 |  |",
        "| m=2 | 1 of 2 | 1 of 2 |  |",
    ]
    assert pivot.joined([table, ["a"]]) == "\n".join([*table, "", "a"])
