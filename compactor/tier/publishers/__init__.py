"""SegmentPublisher, by kind of tier. They know nothing of each other."""
