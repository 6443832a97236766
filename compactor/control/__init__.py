"""What counts and who may: the control log of each partition, the fold over it, the rules that keep data safe, leadership, publication."""
