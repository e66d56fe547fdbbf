"""Where models meet stores: conversion and restoring now, the offloading engine on top of them.

`convert` makes a store of any checkpoint, gives the checkpoint back, and opens a model on a store; `synthesize`
writes checkpoints of any geometry for benchmarks.
"""
