// SPDX-License-Identifier: BSD-3-Clause
#include "api/checkpoint/pickle_reader.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <torchfuse/checkpoint.h>

#include <algorithm>
#include <iterator>
#include <unordered_map>
#include <utility>
#include <vector>

#include "api/checkpoint/pickle_input.h"
#include "api/checkpoint/pickle_objects.h"
#include "api/checkpoint/values.h"

namespace torchfuse::checkpoint {

namespace {

/// Stack entry: a value, a mark, or a global's name.
struct Item {
  enum class Kind { kValue, kMark, kGlobal };
  Kind kind = Kind::kValue;
  c10::IValue value;  ///< for a global, its name: "torch.FloatStorage"
  int depth = 0;      ///< nesting depth of the value
  /// Number of values inside, where a shared value counts once per reference. Nested lists that
  /// share elements can expand a 900-byte file to 2^90 values. Code that walks such a value, for
  /// example to print a message, would never finish.
  std::uint64_t size = 1;
};

/// A list or dict.
struct Holder {
  c10::IValue value;  ///< keeps the address in use
  int depth = 0;
  std::uint64_t size = 1;
  /// True if the container may be referenced elsewhere. A complete container must not change, so
  /// that depths and sizes stay valid and no container contains itself.
  bool is_complete = false;
};

// Pickle protocol 2 opcodes, named as in Python's pickletools.
class Machine {
 public:
  Machine(std::string_view bytes, const ReadStorage& read_storage, std::string where)
      : most_(std::max<std::uint64_t>(1U << 20U, 16 * bytes.size())),
        input_(bytes, std::move(where)),
        read_storage_(read_storage) {}

  c10::IValue run() {
    input_.check(input_.take<std::uint8_t>() == 0x80 && input_.take<std::uint8_t>() == 2,
                 "a pickle of protocol 2, torch.save's default");
    while (true) {
      const auto opcode = input_.take<std::uint8_t>();
      if (opcode == '.') break;  // STOP
      constant(opcode);
    }
    input_.check(stack_.size() == 1, "one value");
    return pop().value;
  }

 private:
  void check_extent(int depth, std::uint64_t size) const {
    input_.check(depth < kMostNested, "values nested less deeply");
    TORCH_CHECK_VALUE(size <= most_, input_.where(), " to hold at most ", most_,
                      " values, got more from shared ones. Save values that share less.");
  }

  void push(c10::IValue value, int depth = 0, std::uint64_t size = 1) {
    check_extent(depth, size);
    stack_.push_back({Item::Kind::kValue, std::move(value), depth, size});
  }

  Item pop_any() {
    input_.check(!stack_.empty(), "values for its instructions");
    Item item = std::move(stack_.back());
    stack_.pop_back();
    return item;
  }

  Item pop(Item::Kind kind = Item::Kind::kValue) {
    Item item = pop_any();
    input_.check(item.kind == kind, "values for its instructions");
    return item;
  }

  /// Pops the values above the last mark, and the mark.
  std::vector<Item> pop_to_mark() {
    const auto is_mark = [](const Item& item) { return item.kind == Item::Kind::kMark; };
    const auto mark = std::find_if(stack_.rbegin(), stack_.rend(), is_mark);
    input_.check(mark != stack_.rend(), "a mark for its instruction");
    std::vector<Item> items(std::make_move_iterator(mark.base()),
                            std::make_move_iterator(stack_.end()));
    stack_.erase(std::prev(mark.base()), stack_.end());
    return items;
  }

  std::vector<Item> pop_several(std::size_t count) {
    std::vector<Item> items(count);
    for (std::size_t i = count; i > 0; --i) items[i - 1] = pop_any();
    return items;
  }

  /// Runs an instruction. Each of the four functions passes on opcodes of other kinds.
  void constant(std::uint8_t opcode) {
    switch (opcode) {
      case 'N':
        return push({});
      case 0x88:  // NEWTRUE
      case 0x89:  // NEWFALSE
        return push(opcode == 0x88);
      case 'J':  // BININT
        return push(std::int64_t{input_.take<std::int32_t>()});
      case 'K':  // BININT1
        return push(std::int64_t{input_.take<std::uint8_t>()});
      case 'M':  // BININT2
        return push(std::int64_t{input_.take<std::uint16_t>()});
      case 0x8a:  // LONG1
        return push(input_.take_long(input_.take<std::uint8_t>()));
      case 'G':  // BINFLOAT
        return push(input_.take_double());
      case 'X':  // BINUNICODE
        return push(input_.take_text(input_.take<std::uint32_t>()));
      default:
        return memo(opcode);
    }
  }

  static bool is_open(const Item& item) {
    return item.kind == Item::Kind::kValue && (item.value.isList() || item.value.isGenericDict());
  }

  Holder& holder_of(const Item& item) {
    Holder& container = containers_[item.value.internalToPointer()];
    container.value = item.value;
    return container;
  }

  void put(std::uint32_t index) {
    input_.check(!stack_.empty(), "values for its instructions");
    memo_[index] = stack_.back();
  }

  void get(std::uint32_t index) {
    const auto found = memo_.find(index);
    input_.check(found != memo_.end(), "a value for its instruction");
    Item item = found->second;
    if (is_open(item)) {
      Holder& container = holder_of(item);
      container.is_complete = true;
      item.depth = container.depth;
      item.size = container.size;
    }
    stack_.push_back(std::move(item));
  }

  void memo(std::uint8_t opcode) {
    switch (opcode) {
      case 'q':  // BINPUT
        return put(input_.take<std::uint8_t>());
      case 'r':  // LONG_BINPUT
        return put(input_.take<std::uint32_t>());
      case 'h':  // BINGET
        return get(input_.take<std::uint8_t>());
      case 'j':  // LONG_BINGET
        return get(input_.take<std::uint32_t>());
      default:
        return container(opcode);
    }
  }

  void push_tuple(std::vector<Item> items) {
    std::vector<c10::IValue> elements;
    int depth = 0;
    std::uint64_t size = 1;
    for (Item& item : items) {
      input_.check(item.kind != Item::Kind::kMark, "values for its instructions");
      depth = std::max(depth, item.depth + 1);
      size += item.size;
      elements.push_back(std::move(item.value));
    }
    push(c10::ivalue::Tuple::create(std::move(elements)), depth, size);
  }

  /// Returns the container on top of the stack, after counting `item`, which the caller adds next.
  const Item& about_to_hold(const Item& item) {
    input_.check(!stack_.empty() && is_open(stack_.back()), "containers for its values");
    input_.check(item.kind == Item::Kind::kValue, "values in its containers");
    Item& top = stack_.back();
    Holder& container = holder_of(top);
    input_.check(!container.is_complete, "no value that holds itself");
    container.depth = top.depth = std::max(top.depth, item.depth + 1);
    container.size = top.size += item.size;
    check_extent(top.depth, top.size);
    return top;
  }

  void append(const std::vector<Item>& items) {
    for (const Item& item : items) {
      const Item& list = about_to_hold(item);
      input_.check(list.value.isList(), "lists for its values");
      list.value.toList().push_back(item.value);
    }
  }

  void set(const std::vector<Item>& items) {
    input_.check(items.size() % 2 == 0, "pairs of keys and values");
    for (std::size_t i = 0; i < items.size(); i += 2) {
      const c10::IValue& key = items[i].value;
      const Item& dict = about_to_hold(items[i + 1]);
      input_.check(dict.value.isGenericDict() && items[i].kind == Item::Kind::kValue,
                   "dicts for its values");
      TORCH_CHECK_VALUE(key.isString() || key.isInt(), input_.where(),
                        " to hold dicts with strings or ints as keys, got a ", type_name(key), ".");
      dict.value.toGenericDict().insert_or_assign(key, items[i + 1].value);
    }
  }

  void container(std::uint8_t opcode) {
    switch (opcode) {
      case '(':  // MARK
        return stack_.push_back({Item::Kind::kMark, {}});
      case ']':  // EMPTY_LIST
        return push(make_list());
      case '}':  // EMPTY_DICT
        return push(make_dict());
      case ')':  // EMPTY_TUPLE
        return push_tuple({});
      case 't':  // TUPLE
        return push_tuple(pop_to_mark());
      case 0x85:  // TUPLE1
      case 0x86:  // TUPLE2
      case 0x87:  // TUPLE3
        return push_tuple(pop_several(opcode - 0x84U));
      case 'a':  // APPEND
        return append(pop_several(1));
      case 'e':  // APPENDS
        return append(pop_to_mark());
      case 's':  // SETITEM
        return set(pop_several(2));
      case 'u':  // SETITEMS
        return set(pop_to_mark());
      default:
        return object(opcode);
    }
  }

  void push_global() {
    const std::string module = input_.take_line();
    const std::string name = module + "." + input_.take_line();
    if (is_dtype(name)) return push(name);
    check_global(input_, name);
    stack_.push_back({Item::Kind::kGlobal, name});
  }

  void reduce() {
    const Item arguments = pop();
    const Item callee = pop(Item::Kind::kGlobal);
    check_extent(0, given_ += arguments.size);  // many calls may share one tuple
    push(call(input_, callee.value.toStringRef(), arguments.value), arguments.depth,
         arguments.size);
    // Arguments may be referenced elsewhere, too. An OrderedDict is called with an empty tuple.
    const bool was_argument = !arguments.value.toTupleRef().elements().empty();
    if (was_argument && is_open(stack_.back())) holder_of(stack_.back()).is_complete = true;
  }

  void object(std::uint8_t opcode) {
    switch (opcode) {
      case 'c':  // GLOBAL
        return push_global();
      case 'Q':  // BINPERSID
        return push(storage_of(input_, pop().value, read_storage_));
      case 'R':  // REDUCE
        return reduce();
      case 'b': {  // BUILD: ignore attributes of a dict, such as a state_dict()'s _metadata
        const Item ignored = pop();
        return input_.check(!stack_.empty() && is_open(stack_.back()),
                            "objects for its attributes");
      }
      default:
        TORCH_CHECK_VALUE(false, input_.where(),
                          " to hold plain values and tensors only, got pickle opcode ",
                          static_cast<int>(opcode), " at byte ", input_.position() - 1, ".");
    }
  }

  std::uint64_t most_;  ///< maximum number of values
  std::uint64_t given_ = 0;
  std::unordered_map<std::uint32_t, Item> memo_;
  std::unordered_map<const void*, Holder> containers_;
  PickleInput input_;
  const ReadStorage& read_storage_;
  std::vector<Item> stack_;
};

}  // namespace

c10::IValue from_pickle(std::string_view bytes, const ReadStorage& read_storage,
                        const std::string& where) {
  std::unordered_map<std::string, at::Tensor> storages;
  const ReadStorage once = [&](const std::string& key, at::ScalarType dtype, std::int64_t numel) {
    at::Tensor& storage = storages[key];
    if (!storage.defined()) storage = read_storage(key, dtype, numel);
    TORCH_CHECK_VALUE(storage.scalar_type() == dtype && storage.numel() == numel, where,
                      " to hold storage ", key, " of one dtype, got two.");
    return storage;
  };
  return Machine(bytes, once, where).run();
}

}  // namespace torchfuse::checkpoint

void torchfuse::check_pickle(std::string_view bytes, const std::string& where) {
  const auto without_values = [&](const std::string&, at::ScalarType dtype, std::int64_t numel) {
    TORCH_CHECK_VALUE(numel >= 0, where, " to hold storages, got one of ", numel, " elements.");
    return at::empty({numel}, at::TensorOptions(dtype).device(at::kMeta));
  };
  checkpoint::from_pickle(bytes, without_values, where);
}
