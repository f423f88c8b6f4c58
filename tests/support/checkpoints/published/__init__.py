"""Models that came with code of their own: configs, formulas and names of tensors, written out from that code."""
