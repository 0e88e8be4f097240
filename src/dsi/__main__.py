from dsi.cli import main

main()
