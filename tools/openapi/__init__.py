"""Write the OpenAPI documents of all HTTP interfaces, beside the schema of messages.

python -m tools.openapi            write libs/protocol/schema/*.openapi.json
python -m tools.openapi --check    fail if they are not what would be written
"""
