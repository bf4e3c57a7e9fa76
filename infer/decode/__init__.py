"""Decoding on the device: pure, jitted functions that advance a `DecodeState` by one step."""
