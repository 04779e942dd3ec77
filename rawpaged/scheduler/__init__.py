"""Which requests run, with which blocks. Plain Python integers only."""
