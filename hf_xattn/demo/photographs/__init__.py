"""The demo's photographs: things in front of several grounds, with questions and answers, and a vision tower.

The photographs are those of Debian's package `tuxpaint-stamps-default`, and the tower is EfficientNet-Lite0.
"""
