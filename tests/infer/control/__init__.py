"""Tests of the controllers of answers."""
