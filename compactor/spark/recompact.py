"""Entry point for spark-submit that runs ``tiered-compactor recompact`` (docs/spark.md). From Python, call ``compactor.spark.recompact``
instead.
"""

if __name__ == "__main__":
    import runpy
    import sys

    # spark-submit puts the script's own folder first, where our modules have no business to be found by their short names.
    sys.path.pop(0)
    sys.argv[1:1] = ["recompact"]
    runpy.run_module("compactor", run_name="__main__")
