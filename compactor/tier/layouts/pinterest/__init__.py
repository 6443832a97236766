"""Layout of Pinterest's tiered storage (github.com/pinterest/tiered-storage): an uploader beside the broker, and consumers of the
bucket.
"""
