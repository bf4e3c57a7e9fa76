"""What must hold of programs for TPUs and GPUs, which are compiled and read here, not run (docs/accelerators.md)."""
