"""What a conversation remembers: keys and values of images, which image belongs to which place of the text, and
what the text has seen.

What may come in: state that lives from call to call.
Imports from: utils.
"""
