"""Makes the data and the vision tower of the demo with photographs: pictures of things, questions and answers.

The photographs come from Debian's package `tuxpaint-stamps-default`, and the vision tower is EfficientNet-Lite0.
"""
