"""Chat sessions, the HTTP server and the web page: everything that runs for a long time and answers a client.

This subpackage imports from: all subpackages before it, and the model.
"""
