"""Request scheduling on the host: admission, the prefix cache, buckets of compiled programs and the runner."""
