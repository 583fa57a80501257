"""The flags of HiCache as fields that ServerArgs takes in: names and meanings are SGLang's where it has the flag."""

from __future__ import annotations

from fenceline.config.flags import flag

_GROUP = "HiCache"

ENABLE = flag(
    False,
    "Keep KV pages in host memory too, under the prefix cache: what the device has no room for comes back by a copy "
    "instead of being computed again.",
    group=_GROUP,
)
RATIO = flag(
    2.0, "Size of the host tier in multiples of the device's KV cache; --hicache-size wins.", group=_GROUP
)
SIZE = flag(0.0, "Size of the host tier in GB (10^9 bytes); 0 goes by --hicache-ratio.", group=_GROUP)
WRITE_POLICY = flag(
    "write_through",
    "When pages are copied to the host: write_through at once, write_through_selective when their prefix is used a "
    "second time, write_back when the device needs their room.",
    group=_GROUP,
    choices=("write_through", "write_through_selective", "write_back"),
)
IO_BACKEND = flag(
    None,
    "How pages travel between device and host: direct by the copy engine, kernel by a copy kernel, which slows down "
    "whatever runs beside it. Unless given, direct; kernel with pages of one token, unless attention may be persistent "
    "(prefill by flashinfer, fa3, auto; decode by fa3, auto), as copy kernels and those have to take turns.",
    group=_GROUP,
    choices=("kernel", "direct"),
    refused={"kernel_ascend": "use --hicache-io-backend kernel or direct"},
)
MEM_LAYOUT = flag(
    "layer_first",
    "The order of bytes in the host tier: layer_first as on the device, page_first with a page's layers side by side, "
    "which a storage writes and reads in one piece.",
    group=_GROUP,
    choices=("layer_first", "page_first"),
    refused=dict.fromkeys(
        ("page_first_direct", "page_first_kv_split", "page_head"), "use --hicache-mem-layout page_first"
    ),
)
STORAGE_BACKEND = flag(
    "none",
    "A third tier that outlives the server: file keeps pages in a directory that servers of one machine may share.",
    group=_GROUP,
    choices=("none", "file"),
    refused=dict.fromkeys(
        ("mooncake", "hf3fs", "nixl", "aibrix", "dynamic", "eic", "lmcache", "simm"),
        "use --hicache-storage-backend file",
    ),
)
STORAGE_DIR = flag(
    None,
    "The directory of --hicache-storage-backend file; it must belong to the user who runs the server and be "
    "writable by nobody else. fenceline-hicache-UID in the system's temporary folder unless given.",
    group=_GROUP,
    metavar="DIR",
)
STORAGE_SIZE = flag(
    None,
    "Most GB (10^9 bytes) of pages in that directory, over all servers that share it; 64, or half the file system if "
    "that is less, unless given.",
    group=_GROUP,
)
STORAGE_KEY = flag(
    None,
    "Authenticate each page in that directory with a secret key: a page that was changed or planted by somebody "
    "without the key is removed and computed again. file:PATH reads the key from a file, env:NAME from an environment "
    "variable; the key itself would show in the list of processes. Servers share pages only where they have the same "
    "key.",
    group=_GROUP,
    metavar="file:PATH|env:NAME",
)
PREFETCH_POLICY = flag(
    "best_effort",
    "How long a request that could run waits for pages that are being read from the storage: best_effort not at all, "
    "wait_complete until all are there, timeout for --hicache-storage-prefetch-timeout.",
    group=_GROUP,
    choices=("best_effort", "wait_complete", "timeout"),
)
PREFETCH_TIMEOUT = flag(
    None,
    "Seconds that a request waits under --hicache-storage-prefetch-policy timeout; 1 unless given.",
    group=_GROUP,
)
RETRACT_POLICY = flag(
    "recompute",
    "What becomes of the KV of a request that is retracted for lack of memory: recompute drops what the prefix cache "
    "cannot keep, offload copies it to the host and back.",
    group=_GROUP,
    choices=("recompute", "offload"),
)
