"""One module per command. They know nothing of each other; how one is made stands in ``compactor.cli``."""
