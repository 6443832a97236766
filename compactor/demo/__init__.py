"""The demo: the main job, end to end, on data that it generates."""
