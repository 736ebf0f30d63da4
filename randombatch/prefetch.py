"""Asking the memory for what will be needed soon, in machine code."""

import functools
from typing import Any


@functools.cache
def prefetching(write: bool = False) -> Any:
    """A compiled `fetch(array, row, column)`: asks for the cache line of an entry of a 1-d or 2-d array, does not wait.

    Nothing is read, so an index out of range is no error. `write` says that it will also be written to.
    """
    from llvmlite import ir
    from numba.core import cgutils, types
    from numba.extending import intrinsic

    @intrinsic
    def fetch(typing, array, row, column):
        def generate(context, builder, signature, arguments):
            make = context.make_array(signature.args[0])(context, builder, arguments[0])
            byte = ir.PointerType(ir.IntType(8))
            place = builder.bitcast(make.data, byte)
            strides = cgutils.unpack_tuple(builder, make.strides, signature.args[0].ndim)
            for k, stride in enumerate(strides):
                index = context.cast(builder, arguments[1 + k], signature.args[1 + k], types.intp)
                place = builder.gep(place, [builder.mul(index, stride)])
            number = ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
            function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
            builder.call(function, [place, number(int(write)), number(3), number(1)])
            return context.get_dummy_value()

        return types.void(array, row, column), generate

    return fetch
