from dsi.cli.main import main

main()
