"""Layout of Aiven's RemoteStorageManager (tiered-storage-for-apache-kafka 1.0 and newer): three objects per segment.

``.log`` holds the log in chunks, which may be compressed and encrypted; ``.indexes`` all other files, concatenated; ``.rsm-manifest``
describes both. They are uploaded in this order, so that a manifest proves that the segment is complete.
"""
