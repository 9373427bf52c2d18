"""Bytes of the wire: one encoder, and one typed decoder per direction.

Invariant: a decoder yields only messages of its own direction; everything else raises `msgspec.MsgspecError`, which
the receiver counts and drops. Nothing on the wire can name code: the set of types is closed.
"""

from __future__ import annotations

import msgspec

from octavo.protocol.config import EngineConfig
from octavo.protocol.engine_messages import EngineCommand, EngineEvent
from octavo.protocol.worker_messages import EngineHello, SchedulerOutput, WorkerEvent

encode = msgspec.msgpack.Encoder().encode
decode_engine_command = msgspec.msgpack.Decoder(EngineCommand).decode
decode_engine_event = msgspec.msgpack.Decoder(EngineEvent).decode
decode_engine_hello = msgspec.msgpack.Decoder(EngineHello).decode
decode_scheduler_output = msgspec.msgpack.Decoder(SchedulerOutput).decode
decode_worker_event = msgspec.msgpack.Decoder(WorkerEvent).decode
decode_config = msgspec.msgpack.Decoder(EngineConfig).decode
