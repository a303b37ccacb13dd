"""An MCP server with one tool, for recipes/envs/shop.yaml. Any other server works the same way."""

from mcp.server import MCPServer

server = MCPServer("shop")
PRICES = {"apple": 3, "pear": 4, "plum": 5, "fig": 6, "lime": 7, "melon": 8, "grape": 9, "date": 2}


@server.tool()
def price(fruit: str) -> str:
    """Price of one fruit, in coins."""
    if fruit not in PRICES:
        return f"there is no {fruit}"
    return str(PRICES[fruit])


if __name__ == "__main__":
    server.run()
