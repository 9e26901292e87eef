"""What a conversation remembers: keys and values of images, which image belongs to which place of the text, what the
text has seen, and the files of encoded images.

What may come in: state that lives from call to call.
Imports from: utils.
"""
