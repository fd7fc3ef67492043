"""A proxy in front of several servers of the OpenAI API, which binds each request to one of them.

Modules here import aiohttp, which is optional: commands import them when they run.
"""
