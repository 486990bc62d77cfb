print("frozen")
