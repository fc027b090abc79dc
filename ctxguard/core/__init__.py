"""The pure core: types, scores, fusion, decision, metrics, assembly. No I/O, no clock."""
