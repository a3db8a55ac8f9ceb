#include "known_shapes.h"

#include <cstring>

#include "tensor_bytes.h"

namespace sim {
namespace {

/// Says all that it is told, so that no two questions are one text.
class Question {
 public:
  void say(const std::string& text) {
    say_number(static_cast<int64_t>(text.size()));
    text_ += text;
  }
  bool say(const c10::IValue& value);
  std::string text() && { return std::move(text_); }

 private:
  template <class Number>
  void say_number(Number number) {
    char bytes[sizeof number];
    std::memcpy(bytes, &number, sizeof number);
    text_.append(bytes, sizeof number);
  }
  template <class Numbers>
  void say_all(char kind, const Numbers& numbers) {
    text_ += kind;
    say_number(static_cast<int64_t>(numbers.size()));
    for (auto number : numbers) say_number(number);
  }
  void say_tensor(const at::Tensor& tensor);

  std::string text_;
};

void Question::say_tensor(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    text_ += 'u';
    return;
  }
  text_ += on_device(tensor) ? 't' : 'h';
  text_ += tensor.unsafeGetTensorImpl()->is_wrapped_number() ? 'w' : ' ';
  say_number(static_cast<int64_t>(tensor.scalar_type()));
  say_number(tensor.storage_offset());
  say_all('s', tensor.sizes());
  say_all('p', tensor.strides());
}

/// Whether it is of a known kind.
bool Question::say(const c10::IValue& value) {
  if (value.isTensor()) {
    say_tensor(value.toTensor());
  } else if (value.isNone()) {
    text_ += 'n';
  } else if (value.isInt()) {
    text_ += 'i';
    say_number(value.toInt());
  } else if (value.isDouble()) {
    text_ += 'd';
    say_number(value.toDouble());
  } else if (value.isBool()) {
    text_ += value.toBool() ? 'y' : 'f';
  } else if (value.isDevice()) {
    text_ += 'c';
    say_number(value.toDevice().type());
  } else if (value.isString()) {
    text_ += 'x';
    say(value.toStringRef());
  } else if (value.isIntList()) {
    say_all('l', value.toIntVector());
  } else if (value.isDoubleList()) {
    say_all('m', value.toDoubleVector());
  } else if (value.isBoolList()) {
    text_ += 'b';
    for (bool each : value.toBoolList()) text_ += each ? 'y' : 'f';
    text_ += 'e';
  } else if (value.isTensorList()) {
    text_ += 'a';
    for (const at::Tensor& tensor : value.toTensorList()) say_tensor(tensor);
    text_ += 'e';
  } else {
    return false;
  }
  return true;
}

}  // namespace

std::optional<std::string> question_of(const c10::OperatorHandle& op,
                                       const std::vector<c10::IValue>& arguments) {
  for (const auto& result : op.schema().returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return std::nullopt;
  Question question;
  question.say(op.schema().name());
  question.say(op.schema().overload_name());
  question.say(c10::IValue(static_cast<int64_t>(c10::get_default_dtype_as_scalartype())));
  for (const auto& value : arguments)
    if (!question.say(value)) return std::nullopt;
  return std::move(question).text();
}

std::optional<std::vector<c10::IValue>> KnownShapes::find(const std::string& question) const {
  std::lock_guard locked(mutex_);
  auto found = shapes_.find(question);
  return found == shapes_.end() ? std::nullopt : std::optional(found->second);
}

void KnownShapes::note(const std::string& question, const std::vector<c10::IValue>& shapes) {
  std::lock_guard locked(mutex_);
  shapes_.emplace(question, shapes);
}

KnownShapes& known_shapes() {
  static auto* known = new KnownShapes;  // Python may know its tensors, and ends before it would
  return *known;
}

}  // namespace sim
