"""The data source over remote segments, and rounds whose tasks run on a Spark cluster.

A partition that is spread over the cluster:

1. Pass 1, a task per bundle of neighbouring segments (at most 16 GiB; two bundles per slot): keys -> 16-byte rows (96 bits of the key's
   hash, the record's position), sorted by hash range, as one scratch object with a directory; for the gate 24 bytes per record more.
2. Filters, before the plan: a task for some clean segments' Bloom filters, compared with all dirty keys. Without a match the segment is
   skipped.
3. Map, a task for some hash ranges, three per slot: newest rows first, the first of each key survives; answers go to the bundles' tasks
   through Spark's shuffle, one for each bundle and range, with a number and a sum of what must survive of each segment, for the gate.
4. Pass 2, a task per group: rewrite, gate, upload under the announced id; a receipt of about 1 KB goes back.

The driver folds transactions between the passes and publishes, in order, alone. A bundle is done when its object exists; a resumed round
indexes only what is missing. Scratch objects lie beside the control log, so that unlike shuffle files they outlive executors and driver.
"""
