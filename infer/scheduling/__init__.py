"""Requests on the host: who gets a row of the cache, what its prompt begins with, and which program runs next.

Its own: the scheduler, handles, the prefix cache, buckets and the runner. It may touch `infer.decode` and
`infer.answers`.
"""
