"""The state of one partition out of the tier, then kept up to date from the broker: docs/consumer.md.

    python docs/examples/restore_state.py tiered-compactor.toml orders 0 127.0.0.1:9092

Prints how many keys there are, and then every change.
"""

from __future__ import annotations

import sys

from compactor.consumer import Place, open_consumer


def main(config: str, topic: str, partition: str, bootstrap_servers: str = "") -> None:
    state: dict[bytes, bytes] = {}
    with open_consumer(config, bootstrap_servers=bootstrap_servers) as consumer:
        restored = consumer.latest(Place(topic, int(partition)))
        for batch in restored.arrow("key", "value"):
            state.update(zip(batch["key"].to_pylist(), batch["value"].to_pylist(), strict=True))
        print(f"{len(state)} keys at offset {restored.next_offset}")
        consumer.assign([restored.next_place])
        while True:
            message = consumer.poll(1.0)
            if message is None:
                continue
            if message.error():
                print(message.error(), file=sys.stderr)
                continue
            key, value = message.key(), message.value()
            print(message.offset(), key, value)
            if key is not None and value is not None:
                state[key] = value
            elif key is not None:
                state.pop(key, None)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except KeyboardInterrupt:
        pass
