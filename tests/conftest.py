from hypothesis import settings

settings.register_profile("dsi", deadline=None, print_blob=True)
settings.load_profile("dsi")
