#!/usr/bin/env bash
# kafka-python 3.0.12: the admin client can neither read nor alter the cluster-wide defaults of brokers.
#
# Input: ConfigResource(BROKER, ""), which is how Kafka's protocol names the dynamic defaults of all brokers (KIP-226;
#   `kafka-configs.sh --entity-type brokers --entity-default`).
# Expected: a request to any broker.
# Seen: ValueError: Broker resource names must be an integer or a string represented integer. It is raised before a broker is asked, so that the
#   script needs none: it groups the resource as describe_configs and alter_configs do first.
# Way around: confluent-kafka takes the empty name.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check kafka-python==3.0.12

cat > "$folder/group.py" <<'PY'
from kafka.admin import ConfigResource, ConfigResourceType, KafkaAdminClient

try:
    print(KafkaAdminClient._group_config_resources([ConfigResource(ConfigResourceType.BROKER, "")]))
except ValueError as error:
    print(error)
PY

expected="Broker resource names must be an integer or a string represented integer"
seen=$("$folder/env/bin/python" "$folder/group.py")
echo "kafka-python 3.0.12: $seen"
[ "$seen" = "$expected" ] || { echo "changed: this was seen before: $expected"; exit 1; }
