#!/usr/bin/env bash
# kafka-python 3.0.12: a response that has a header cannot be encoded with encode(version=...).
#
# Input: a MetadataResponse without brokers and topics.
# Expected: `with_header(...)`, then `encode(version=9, header=True)`, encodes header and body, as it does for requests.
# Seen: AttributeError: 'ResponseHeader' object has no attribute 'request_api_version'.
# Cause: the setter of ApiMessage.API_VERSION sets header.request_api_version, also of a response's header.
# Way around: MetadataResponse[9](...), or encode(version=9) before with_header().
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check kafka-python==3.0.12

cat > "$folder/encode.py" <<'PY'
from kafka.protocol.metadata import MetadataRequest, MetadataResponse

request = MetadataRequest(topics=[])
request.with_header(correlation_id=1)
assert request.encode(version=9, header=True)

response = MetadataResponse(throttle_time_ms=0, brokers=[], cluster_id=None, controller_id=0, topics=[])
response.with_header(correlation_id=1)
try:
    response.encode(version=9, header=True)
    print("encoded")
except AttributeError as error:
    print(error)
PY

expected="'ResponseHeader' object has no attribute 'request_api_version'"
seen=$("$folder/env/bin/python" "$folder/encode.py")
echo "kafka-python 3.0.12: $seen"
[ "$seen" = "$expected" ] || { echo "changed: this was seen before: $expected"; exit 1; }
