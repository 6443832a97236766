"""The replacement protocol as a specification that TLC checks exhaustively (Replacement.tla, docs/broker-protocol.md)."""
