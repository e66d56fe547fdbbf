"""`moelab inspect STORE`: what is in a store, read from its index alone."""

from __future__ import annotations

import argparse

from moelab.base.table import head_and_rows, text_table
from moelab.store.layout import CHECKSUM, SOURCE_LAYOUT, ExpertStore


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", help="the store's folder")


def main(args: argparse.Namespace) -> int:
    store = ExpertStore(args.store)
    spec = store.spec
    padded = sum(layer.size for layer in store.layers)
    print(
        f"{store.folder}: {spec.name} ({spec.model_type}), source {store.identity}",
        f"{spec.L} MoE layers of {spec.E} experts, {spec.K} a token; codec {store.codec}, checksums {CHECKSUM}",
        f"rounded to {store.quantized}, so its source cannot be restored"
        if store.quantized
        else "restored, it is the files that it was made from"
        if SOURCE_LAYOUT in store.files
        else "without the bytes of its source, which cannot be restored",
        "",
        text_table(*head_and_rows(store.table())),
        "",
        f"files of the experts with headers and padding {padded / 1e6:,.2f} MB; all other weights "
        f"{store.weights_size / 1e6:,.2f} MB",
        sep="\n",
    )
    return 0
