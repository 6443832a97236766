#!/usr/bin/env bash
# localstack-core 2026.3.0: its package says Python >= 3.10, and its code is not valid before Python 3.12.
#
# Input: `pip download` for Python 3.10, which takes the wheel.
# Expected: what pip installs for a version of Python can be imported with it. Python's "Core metadata specifications", Requires-Python: the versions of
#   Python that the distribution is compatible with.
# Seen: "Requires-Python: >=3.10", and nine modules with the type parameters of PEP 695 (Python 3.12): Python 3.10 and 3.11 report a SyntaxError.
# Way around: Python 3.12 or newer.
# Needs: Python 3.11 or newer as python3, with pip.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.10 --dest "$folder" localstack-core==2026.3.0

cat > "$folder/parse.py" <<'PY'
import ast
import sys
import zipfile

wheel = zipfile.ZipFile(sys.argv[1])
names = wheel.namelist()
metadata = wheel.read(next(name for name in names if name.endswith("METADATA"))).decode()
print(*(line for line in metadata.splitlines() if line.startswith("Requires-Python")))
for name in sorted(names):
    if name.endswith(".py"):
        try:
            ast.parse(wheel.read(name), feature_version=(3, 11))
        except SyntaxError:
            print(name)
PY

expected="Requires-Python: >=3.10
localstack/services/cloudformation/engine/v2/change_set_model_preproc.py
localstack/services/cloudformation/resource_provider.py
localstack/services/events/models.py
localstack/services/kms/utils.py
localstack/services/sqs/queue.py
localstack/services/stepfunctions/asl/component/test_state/state/base_mock.py
localstack/services/stores.py
localstack/state/pickle.py
localstack/testing/aws/util.py"
seen=$(python3 "$folder/parse.py" "$folder"/*.whl)
echo "$seen"
[ "$seen" = "$expected" ] || { echo "changed: this was seen before: $expected"; exit 1; }
