"""Where ranks stand and what is divided among them: the mesh, the layout with its text form, the ZeRO table.

Values and arithmetic only; nothing here imports torch.
"""
