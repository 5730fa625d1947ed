import datetime

from fissile.v1 import sequence_pb2 as _sequence_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ExecuteRequest(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[ExecuteCommand]
    def __init__(self, commands: _Optional[_Iterable[_Union[ExecuteCommand, _Mapping]]] = ...) -> None: ...

class ExecuteCommand(_message.Message):
    __slots__ = ("group", "abort")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    group: _sequence_pb2.SequenceGroup
    abort: _sequence_pb2.AbortSequence
    def __init__(self, group: _Optional[_Union[_sequence_pb2.SequenceGroup, _Mapping]] = ..., abort: _Optional[_Union[_sequence_pb2.AbortSequence, _Mapping]] = ...) -> None: ...

class ExecuteResponse(_message.Message):
    __slots__ = ("step", "outputs", "load", "last_sequence_id")
    STEP_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    step: int
    outputs: _containers.RepeatedCompositeFieldContainer[_sequence_pb2.RequestOutput]
    load: _sequence_pb2.WorkerLoad
    last_sequence_id: int
    def __init__(self, step: _Optional[int] = ..., outputs: _Optional[_Iterable[_Union[_sequence_pb2.RequestOutput, _Mapping]]] = ..., load: _Optional[_Union[_sequence_pb2.WorkerLoad, _Mapping]] = ..., last_sequence_id: _Optional[int] = ...) -> None: ...

class WatchKvEventsRequest(_message.Message):
    __slots__ = ("from_sequence_number",)
    FROM_SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    from_sequence_number: int
    def __init__(self, from_sequence_number: _Optional[int] = ...) -> None: ...

class WatchKvEventsResponse(_message.Message):
    __slots__ = ("sequence_number", "events", "is_snapshot", "epoch")
    SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    IS_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    sequence_number: int
    events: _containers.RepeatedCompositeFieldContainer[KvEvent]
    is_snapshot: bool
    epoch: str
    def __init__(self, sequence_number: _Optional[int] = ..., events: _Optional[_Iterable[_Union[KvEvent, _Mapping]]] = ..., is_snapshot: bool = ..., epoch: _Optional[str] = ...) -> None: ...

class KvEvent(_message.Message):
    __slots__ = ("stored", "removed", "cleared")
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    stored: KvBlocksStored
    removed: KvBlocksRemoved
    cleared: KvCacheCleared
    def __init__(self, stored: _Optional[_Union[KvBlocksStored, _Mapping]] = ..., removed: _Optional[_Union[KvBlocksRemoved, _Mapping]] = ..., cleared: _Optional[_Union[KvCacheCleared, _Mapping]] = ...) -> None: ...

class KvBlocksStored(_message.Message):
    __slots__ = ("block_hashes", "parent_hash", "token_ids", "cache_salt", "block_size")
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    PARENT_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[int]
    parent_hash: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    cache_salt: bytes
    block_size: int
    def __init__(self, block_hashes: _Optional[_Iterable[int]] = ..., parent_hash: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., cache_salt: _Optional[bytes] = ..., block_size: _Optional[int] = ...) -> None: ...

class KvBlocksRemoved(_message.Message):
    __slots__ = ("block_hashes",)
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, block_hashes: _Optional[_Iterable[int]] = ...) -> None: ...

class KvCacheCleared(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetWorkerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetWorkerResponse(_message.Message):
    __slots__ = ("model", "architectures", "tokenizer_fingerprint", "max_model_len", "vocab_size", "block_size", "num_blocks", "hash_scheme", "dp_rank", "dp_size", "tp_size", "epoch", "capabilities", "dtype", "device", "kernel_backend", "eos_token_ids", "version", "model_aliases", "model_fingerprint", "model_version", "max_num_seqs", "lockstep_group")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURES_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HASH_SCHEME_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    DP_SIZE_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    KERNEL_BACKEND_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_ALIASES_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    LOCKSTEP_GROUP_FIELD_NUMBER: _ClassVar[int]
    model: str
    architectures: _containers.RepeatedScalarFieldContainer[str]
    tokenizer_fingerprint: str
    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int
    hash_scheme: str
    dp_rank: int
    dp_size: int
    tp_size: int
    epoch: str
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    dtype: str
    device: str
    kernel_backend: str
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    version: str
    model_aliases: _containers.RepeatedScalarFieldContainer[str]
    model_fingerprint: str
    model_version: str
    max_num_seqs: int
    lockstep_group: str
    def __init__(self, model: _Optional[str] = ..., architectures: _Optional[_Iterable[str]] = ..., tokenizer_fingerprint: _Optional[str] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., hash_scheme: _Optional[str] = ..., dp_rank: _Optional[int] = ..., dp_size: _Optional[int] = ..., tp_size: _Optional[int] = ..., epoch: _Optional[str] = ..., capabilities: _Optional[_Iterable[str]] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., kernel_backend: _Optional[str] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., version: _Optional[str] = ..., model_aliases: _Optional[_Iterable[str]] = ..., model_fingerprint: _Optional[str] = ..., model_version: _Optional[str] = ..., max_num_seqs: _Optional[int] = ..., lockstep_group: _Optional[str] = ...) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTokenizerResponse(_message.Message):
    __slots__ = ("name", "data", "sha256", "fingerprint")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    name: str
    data: bytes
    sha256: str
    fingerprint: str
    def __init__(self, name: _Optional[str] = ..., data: _Optional[bytes] = ..., sha256: _Optional[str] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("load", "step", "uptime")
    LOAD_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    load: _sequence_pb2.WorkerLoad
    step: int
    uptime: _duration_pb2.Duration
    def __init__(self, load: _Optional[_Union[_sequence_pb2.WorkerLoad, _Mapping]] = ..., step: _Optional[int] = ..., uptime: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout",)
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    timeout: _duration_pb2.Duration
    def __init__(self, timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("num_finished", "num_aborted", "undrained")
    NUM_FINISHED_FIELD_NUMBER: _ClassVar[int]
    NUM_ABORTED_FIELD_NUMBER: _ClassVar[int]
    UNDRAINED_FIELD_NUMBER: _ClassVar[int]
    num_finished: int
    num_aborted: int
    undrained: bool
    def __init__(self, num_finished: _Optional[int] = ..., num_aborted: _Optional[int] = ..., undrained: bool = ...) -> None: ...

class UndrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UndrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClearPrefixCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClearPrefixCacheResponse(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class StartProfileRequest(_message.Message):
    __slots__ = ("output_dir",)
    OUTPUT_DIR_FIELD_NUMBER: _ClassVar[int]
    output_dir: str
    def __init__(self, output_dir: _Optional[str] = ...) -> None: ...

class StartProfileResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopProfileRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopProfileResponse(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...
