"""SegmentLayout, by the name that ``tier.layout`` has for it. They know nothing of each other."""
