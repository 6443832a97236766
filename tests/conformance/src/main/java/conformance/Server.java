package conformance;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ObjectNode;

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;

/** One question per line of standard input, one answer per line of standard output, both JSON. */
public final class Server {
    static final ObjectMapper JSON = new ObjectMapper();

    private Server() { }

    public static void main(String[] args) throws Exception {
        PrintStream answers = new PrintStream(System.out, false, StandardCharsets.UTF_8);
        System.setOut(System.err);
        BufferedReader questions = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = questions.readLine(); line != null; line = questions.readLine()) {
            answers.println(JSON.writeValueAsString(answer(JSON.readTree(line))));
            answers.flush();
        }
    }

    /** `refused`: the cleaner itself would not take the log; `failed`: the question could not be put. */
    private static JsonNode answer(JsonNode question) {
        try {
            return switch (question.path("do").asText()) {
                case "generate" -> Generator.generate(question.get("seed").asLong(), question.get("profile").asText(),
                    question.path("parts").asInt(1), Path.of(question.get("dir").asText()));
                case "clean" -> Cleaning.clean(Path.of(question.get("log_dir").asText()), Path.of(question.get("out_dir").asText()),
                    question.get("request"));
                case "read" -> Reading.read(Path.of(question.get("dir").asText()), question.path("recover").asBoolean());
                case "fold" -> Tiered.fold(question);
                case "partition" -> JSON.createObjectNode().put("partition", Tiered.partition(question));
                default -> throw new IllegalArgumentException("cannot do " + question.path("do").asText());
            };
        } catch (Cleaning.Refused refusal) {
            return problem("refused", refusal.getCause());
        } catch (Throwable failure) {
            System.err.println();
            failure.printStackTrace();
            return problem("failed", failure);
        }
    }

    private static ObjectNode problem(String kind, Throwable cause) {
        return JSON.createObjectNode().put(kind, cause.getClass().getSimpleName() + ": " + cause.getMessage());
    }
}
