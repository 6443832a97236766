"""Aiven's RemoteStorageManager (tiered-storage-for-apache-kafka 1.0 and newer): three objects a segment, chunked, compressed, encrypted.

``.log`` the log in chunks, ``.indexes`` all other files one behind the other, ``.rsm-manifest`` where what lies and under which key.
Uploaded in this order: a manifest says that the segment is whole.
"""
