"""The cache of a conversation: keys and values of images, the place of each image in the text, and what the text has
seen of the images.

This subpackage holds the state that lives from call to call. It imports from: utils.
"""
