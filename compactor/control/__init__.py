"""Control logs of partitions, the state that they fold to, the ordering rules that keep data safe, leadership, and publication."""
