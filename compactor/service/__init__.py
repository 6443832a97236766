"""What stands above single rounds: the demo."""
