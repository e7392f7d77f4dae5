"""Single images: attention, trees and leaves drawn over them."""
