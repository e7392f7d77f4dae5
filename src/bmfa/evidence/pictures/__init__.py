"""Single pictures: attention, trees and leaves drawn over them."""
