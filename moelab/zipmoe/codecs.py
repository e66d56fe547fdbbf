"""The general codecs that ZipMoE compresses exponents with, beside the Huffman coding in them alone.

Source: ZipMoE §2.2 and Fig. 3 (LZ4HC and ZSTD). A store knows them by name
(`moelab.store.codecs.CODECS`); what is compressed are byte planes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lz4.block
import zstandard

from moelab.store.bits import as_bytes
from moelab.store.codec import RAW, Codec


class LZ4(Codec):
    """LZ4HC, level 9, without the size."""

    def compress(self, data: Any) -> bytes:
        how = {"mode": "high_compression", "compression": 9, "store_size": False}
        return lz4.block.compress(as_bytes(data), **how)

    def decompress(self, blob: Any, out: Any) -> None:
        source = as_bytes(blob)
        target = as_bytes(out, writable=True)
        try:
            data = lz4.block.decompress(source, uncompressed_size=len(target))
        except lz4.block.LZ4BlockError as error:
            raise ValueError(f"no LZ4 blob of {len(target)} bytes: {error}") from None
        RAW.decompress(data, target)


@dataclass(frozen=True)
class Zstd(Codec):
    """Zstandard frames; level 0 is Huffman coding without matches, by parameters that find none."""

    level: int

    def compress(self, data: Any) -> bytes:
        parameters = zstandard.ZstdCompressionParameters(
            window_log=17,
            chain_log=6,
            hash_log=6,
            search_log=1,
            min_match=7,
            target_length=0,
            strategy=zstandard.STRATEGY_FAST,
        )
        how = {"level": self.level} if self.level else {"compression_params": parameters}
        return zstandard.ZstdCompressor(**how).compress(as_bytes(data))

    def decompress(self, blob: Any, out: Any) -> None:
        source = as_bytes(blob)
        target = as_bytes(out, writable=True)
        try:
            with zstandard.ZstdDecompressor().stream_reader(source) as reader:
                whole = reader.readinto(target) == len(target) and not reader.read(1)
        except zstandard.ZstdError:
            whole = False
        if not whole:
            raise ValueError(
                f"no zstd frame of {len(target)} bytes: it is damaged or of another size"
            )


LZ4HC = LZ4("lz4hc")
ZSTD = Zstd("zstd", 1)
ZSTD_HUFFMAN = Zstd("zstd-huffman", 0)
