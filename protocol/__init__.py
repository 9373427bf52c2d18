"""The only vocabulary that the processes share: config, sampling params, messages, codec, transport, lifecycle.

It decides nothing and imports nothing of ours, so that every process can import all of it. A type belongs here when
it crosses a process border; what only one process uses belongs to that process's package.
"""
